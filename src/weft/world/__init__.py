"""Processes and their communication: ranks and groups (`world`), launching (`launch`), a record of each rank's collectives (`recorder`)."""
