"""The command line: what a rules file does to a checkpoint, without running a model.

``commands`` has the commands, ``sources`` reads what they take for a tree, ``lint``
finds what is wrong with rules, ``bench`` measures this machine.
"""
