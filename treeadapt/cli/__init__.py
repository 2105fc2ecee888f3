"""The command line: what rules and migrations do to a checkpoint, without its model.

``commands`` has the commands, with a module for what each of them does, imported when
it is called. ``sources`` reads what they take for a tree, ``outcome`` what a table does
to it, ``migration_findings`` finds what is wrong with a migration, ``printing`` prints.
"""
