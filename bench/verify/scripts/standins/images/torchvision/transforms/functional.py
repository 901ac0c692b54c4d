"""A module that some scripts import and do not use."""
