"""Two models in, a proven table out, without names or numbers in common.

To read in this order: ``sides`` has the leaves of both sides and calls the models.
``cuts`` cuts leaves until both sides have parts of equal sizes. ``orders`` lists the
orders of axes that a part may have on the other side, and draws *blind* numbers, which
none of them changes. ``pairs`` changes one part at a time: equal answers are pairs;
``layers`` says which parts are likely alike, so one layer is asked for all of them.
``axes`` shows one pair at a time, all others blind. ``changes`` looks for numbers
plus one and for factors. ``influence`` measures through which leaves two models differ
that no table makes alike, and ``differences`` says it. ``judge`` compares both models
on numbers that the search did not see. ``match`` has the function that leads through
all of it, and ``model_match`` the result.
"""
