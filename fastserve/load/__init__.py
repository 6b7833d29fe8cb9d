"""`fastserve bench`: a load generator (a small C program), its plan, its results.

build.py       compiles loadgen.c when it is first needed
plan.py        what to send, and when: closed loop, open loop, trace
run.py         runs one or more of the programs, and adds up what they found
histogram.py   the times they measured
command.py     the command; chats.py has what it asks, cpu.py what that costs
"""
