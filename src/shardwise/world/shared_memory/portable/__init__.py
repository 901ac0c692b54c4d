"""The transport without a C library: `channel` has the calls, `slots`, `job` and `rings` the three methods, `segment` the memory layout."""
