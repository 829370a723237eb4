"""What a run needs around its work: a command line, a workdir with a report and a journal, a profile."""
