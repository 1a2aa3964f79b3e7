"""Outside harnesses whose requests are recorded: an OpenAI-compatible server on the loopback, one for each rank.

harness (a user's function)   --HTTP-->   server      a thread with an event loop: checks keys and the HTTP form
                                          requests    checks which fields can be honoured; errors in OpenAI's form
                                          recording   turns messages into tokens and into rows for training
                                          serving     the rank's loop: passes requests to the engine, tokens back
"""
