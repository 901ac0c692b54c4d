"""What lies where between forward and backward: kept, run again, on the host, or gathered from pieces for one layer."""
