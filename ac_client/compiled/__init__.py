"""Carry out the policies of models that torch.compile compiled."""
