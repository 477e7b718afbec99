"""Cuts the user's data into requests, and checks that the data do not change while labels are pending."""
