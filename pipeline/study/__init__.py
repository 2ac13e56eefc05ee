"""The studies of [P] (Gong et al. 2021): the loss against the step, and against other quantisers."""
