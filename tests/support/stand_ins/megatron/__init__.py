"""A stand-in for the calls of `docs/migrate/megatron.md` on one process, where Megatron-Core is not installed."""
