"""The frame of a run: command line, workdir with a report and a journal, profile."""
