"""Collectives between processes of one host through shared memory: no sockets, no threads, one copy or none.

In: tensors on the host. Out: the same results on every rank, bit for bit, in every run. `setup` agrees on segments and maps them, `segment`
allocates the memory, `native` runs the collectives in C, compiled on first use; without a C compiler the ranks use gloo. Hosts are
connected by gloo or NCCL.
"""
