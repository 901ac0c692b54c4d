"""Other libraries' training loops around a divided model: `weft.adapters.transformers`, `.trl`, `.accelerate`, `.lightning`.

In: the library's own class, which is imported when one of these files is. Out: the same class, which divides the model and is otherwise
itself. The library sees one process with one device, which has the whole batch: all ranks load the same batches, so that schedules,
metrics, logs and what a loop computes outside of the model are those of the serial run; the model's code alone runs divided.
"""
