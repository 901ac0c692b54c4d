"""From a graph, a cluster and a batch to a `Plan`: every legal layout priced, the best few timed, one chosen, with reasons."""
