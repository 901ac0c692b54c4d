"""One file a peer: `build(case, rank, num_ranks, **options)` returns `step(tokens) -> loss`, where `tokens` is the whole batch.

`step` trains on the rank's part and returns its loss, or None where the rank has none; the mean over ranks is the batch's loss.
"""
