"""Tasks: loss, metrics and targets of classification and dense prediction."""
