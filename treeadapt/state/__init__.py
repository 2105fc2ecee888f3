"""What an optimizer's state holds, and how an earlier state fills a new one.

``state_map`` says what each leaf of a state is; everything else here reads it.
"""
