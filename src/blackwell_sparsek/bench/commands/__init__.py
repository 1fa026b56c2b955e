"""The subcommands of `bsk`: each module has `add_to(subparsers)` and the function it runs."""
