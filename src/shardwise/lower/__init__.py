"""Lowering: from plan and graph to one rank's local stages, with explicit redistributions and their duals."""
