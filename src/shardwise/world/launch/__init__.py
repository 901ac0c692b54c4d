"""Rank processes: started, watched, replaced."""
