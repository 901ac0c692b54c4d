"""Processes and how they talk: ranks and groups (`world`), starting them (`launch`), what each of them last did (`recorder`)."""
