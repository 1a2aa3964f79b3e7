"""Outside harnesses whose requests are recorded: an OpenAI-compatible server on the loopback, one for each rank.

harness (a user's function)   --HTTP-->   server      a thread with an event loop: who asks, and what is well formed
                                          requests    what can be honoured, in OpenAI's words
                                          recording   from messages to tokens; the rows that are trained
                                          serving     the loop of the rank: requests into the engine, tokens back
"""
