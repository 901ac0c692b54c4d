"""State that outlives a failed rank (snapshots), and the evidence of whether it is right."""
