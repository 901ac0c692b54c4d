"""Collectives between processes of one host through memory that all have mapped: no sockets, no threads, one copy or none.

In: tensors on the host. Out: the same results on every rank, bit for bit, in every run. `meet` agrees and maps, `segment` holds the memory,
`native` (C, compiled on first use) and `portable` (Python) run the collectives. Between hosts ranks use gloo or NCCL.
"""
