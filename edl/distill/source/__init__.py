"""Cuts the user's data into requests, and checks that it does not change while its labels are pending."""
