"""One thin file a subcommand: parse, one core call, print."""
