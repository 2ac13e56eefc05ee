"""What training consists of: the ranks, the settings, the stream of batches, the update of the weights."""
