"""The transport without a C library: `channel` has the calls, `stream`, `job` and `message` the three ways, `memory` the segment."""
