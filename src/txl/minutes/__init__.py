"""Choice of a run for a text, this machine and a number of minutes: `txl train --minutes`."""
