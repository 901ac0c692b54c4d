"""Plan and graph to one rank's local stages: local shapes, and explicit redistributions with their duals."""
