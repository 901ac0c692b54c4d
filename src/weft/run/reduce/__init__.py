"""What ranks sum: gradients, as they are or compressed, whole or scattered, in step or late; and buffers that a step writes."""
