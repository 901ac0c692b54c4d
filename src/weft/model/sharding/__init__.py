"""From factor rules to the placement of every value."""
