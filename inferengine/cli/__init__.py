"""One module per command of the command line, and what they share: `run(arguments) -> exit code`."""
