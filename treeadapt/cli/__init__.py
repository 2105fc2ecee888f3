"""The command line: what rules and migrations do to a checkpoint, without its model.

``commands`` has the commands, ``sources`` reads what they take for a tree, ``lint``
finds what is wrong with rules and migrations, ``printing`` prints, ``bench`` measures
this machine.
"""
