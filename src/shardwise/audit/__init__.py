"""Audit of any training script: does its parallel run compute what its serial run computes?

`record` runs inside the script, in every process, and imports nothing of shardwise, so that it works in any environment; `hook` starts it.
The other files read what was recorded, measure the noise of rounding, compare, and name the first difference.
"""
