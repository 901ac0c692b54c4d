"""`Program` and costs to a `Timeline` and to memory, exactly and without running anything."""
