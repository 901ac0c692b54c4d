"""Step time of a layout: balanced stages, heterogeneous devices, the simulated schedule."""
