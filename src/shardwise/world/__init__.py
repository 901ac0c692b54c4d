"""Processes and their communication: ranks and groups (`make_world`), launching (`launch`), a record of each rank's collectives
(`recorder`)."""
