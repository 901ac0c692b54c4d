"""From a user's module, a batch and a loss to a `Graph`: reading, patches of what torch does otherwise, construction without memory."""
