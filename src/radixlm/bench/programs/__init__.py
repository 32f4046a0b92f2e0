"""`radixlm bench programs`: programs that call a model many times, and what each part of the system gives them."""
