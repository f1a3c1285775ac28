"""Choice of a run for a text, this machine and a number of minutes: `txl train --minutes`.

`measured` examines the text and the machine, with `facts` and `timing`; `rule` chooses from what they found.
"""
