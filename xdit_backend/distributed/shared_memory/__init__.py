"""Process group of ranks on one machine that exchange tensors through shared memory. docs/design/transports.md."""
