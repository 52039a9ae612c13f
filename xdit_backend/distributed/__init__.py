"""What carries the methods: process groups, collectives, exchanges, which tokens and rows a rank has,
attention that can be merged."""
