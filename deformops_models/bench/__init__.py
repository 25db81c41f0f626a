"""`deformops-models bench`: times the operators and their peers on one GPU, each row gated by its error."""
