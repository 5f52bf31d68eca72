"""The joint graph of a compiled step: which nodes run in forward, where it is cut, how it is profiled."""
