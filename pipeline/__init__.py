"""From a trained network to a quantised one: data, training, quantisation, graph, report, command line."""
