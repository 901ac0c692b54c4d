"""The middle: frozen data that every other part meets in. Standard library only."""
