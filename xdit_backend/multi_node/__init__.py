"""Several machines: the connections between them, what the host keeps of one that has joined,
and the program that joins one."""
