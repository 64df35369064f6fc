"""The phrasings the built-in model's messages are made of, by purpose.

`{a|b|}` is a choice, `<items>`, `<id>`, `<date>`, `<city>`, `<name>` a value. `vocabulary.cut` holds every fifth
phrasing of a list out of training, so held-out rows are worded in sentences no training row contains.
"""

from __future__ import annotations

from typing import Final

# intent -> ways to say it. With <id> in the sentence, with <items>, with both; messages.py picks one that fits.
INTENTS: Final[dict[str, list[str]]] = {
    "order": [
        "{I would|I'd} like to order <items>.",
        "{Please|Pls} send me <items>.",
        "{Can|Could} {I|we} {get|have} <items>{, please|}?",
        "{I|We} {want|wish} to buy <items>.",
        "{We'd|We would} like to buy <items>{, please|}.",
        "New order: <items>.",
        "{I|We} need <items>.",
        "{I|We} need to order {some things|a few things}: <items>.",
        "{Put|Add} <items> {in|on} a new order{ for me|}.",
        "{Can|Could} you {please|} send {me|us} <items>?",
        "{Could|Can} you ship <items>{ to me|}?",
        "We are looking to buy <items>.",
        "{Please|Kindly} {ship|deliver} <items>.",
        "My order this time: <items>.",
        "{I'm|I am} placing {an|a new} order for <items>.",
        "Order for {me|us}: <items>.",
        "{I'd|We'd} like <items>{, please|}.",
        "{Do|Would} you have <items>? {If so, send them|Then I will take them}.",
        "{I|We} {will|would} take <items>.",
        "{I|We} would like to {get|have} <items>.",
    ],
    "track": [
        "Where is {my|our} order <id>?",
        "{My|Our} order <id> {has not|hasn't} arrived{ yet|}.",
        "{Any|Is there any} news {on|about} order <id>?",
        "When will {my|our} <items> {arrive|get here}? {Order|The order is} <id>.",
        "When will order <id> {arrive|get here}?",
        "{I'm|I am} {still|} waiting for order <id>.",
        "{Can|Could} you tell me where order <id> is?",
        "{I|We} {have not|haven't} {received|got} <items> yet, order {number|no.} <id>.",
        "What is the status of {order|my order} <id>?",
        "I am still waiting for <items> from order <id>.",
        "Has order <id> shipped{ yet|}?",
        "Please track {parcel|order|package} <id>.",
        "Tracking for <id> {shows nothing|has not moved}.",
        "{The|My} {parcel|package} <id> is {late|still not here}.",
        "Could you track {my|our} {package|parcel} <id>{, please|}?",
        "Is order <id> on {its|the} way?",
    ],
    "cancel": [
        "{Please|Pls} cancel {my|our|the} order <id>.",
        "{I|We} want to cancel order <id>.",
        "{I|We} {don't|do not} need <items> {anymore|any more}, {please|} cancel <id>.",
        "{Can|Could} you cancel order <id>{, please|}?",
        "Cancel order <id>{, please| for me}.",
        "Cancel <id>{, please|}.",
        "{I'd|I would} like to cancel <items> from order <id>.",
        "{I|We} changed {my|our} mind, cancel order <id>.",
        "{Stop|Do not send} order <id>, {I|we} want to cancel it.",
        "{I|We} would like to cancel <id>{, please|}.",
        "Is it too late to cancel order <id>?",
        "I ordered <items> by mistake, cancel <id>{ please|}.",
        "{We|I} need to cancel {order|number} <id>.",
        "Order <id> {can|should} be cancelled{, thanks|}.",
        "{Please|Kindly} cancel <items>, order {number|no.} <id>.",
    ],
    "return": [
        "{I|We} want to return <items> from order <id>.",
        "How do I return order <id>?",
        "{I'd|I would} like to {return|send back} <items>, order <id>.",
        "{Can|Could} {I|we} send back <items>? {Order|It is order} <id>.",
        "{Can|Could} {I|we} return <items> from <id>?",
        "<id>: {I|we} want to send <items> back.",
        "{I'm|I am} returning order <id>.",
        "{Please|Pls} send {me|us} a return label for <id>.",
        "{The|My} order <id> {does not|doesn't} fit, {I|we} want to return it.",
        "{I|We} would like to return order <id>{, please|}.",
        "Return request for <items>, order <id>.",
        "{I|We} {don't|do not} like <items>, {can I|I want to} return {it|that}? Order <id>.",
        "A return label for order <id>{, please|}.",
        "{I|We} need to send back order <id>.",
        "{I|We} need a return label for <items>, {order|number} <id>.",
    ],
    "refund": [
        "{I|We} want a refund for order <id>.",
        "{I|We} {have not|haven't} got {my|the} refund for <id>{ yet|}.",
        "{Please|Pls} refund <items> from order <id>.",
        "When do I get my money back for order <id>?",
        "{Can|Could} {I|we} get a refund for order <id>{, please|}?",
        "{I|We} sent back <items>, where is the refund for <id>?",
        "Refund {order|number} <id>{, please|}.",
        "I was charged twice for order <id>, {I want a|please} refund.",
        "{My|The} money for <id> {has not|hasn't} come back.",
        "I would like my money back for order <id>.",
        "{I'd|I would} like a refund for <items>, order <id>.",
        "You {still|} owe me a refund for <id>.",
        "I want my money back for <items>, order <id>.",
        "Still no refund for order <id>.",
        "{Please|Kindly} refund order <id>.",
    ],
    "damaged": [
        "From my order <items> {arrived|came} broken, order <id>.",
        "Order <id> {arrived|came} damaged.",
        "{I|We} got <items> and {everything|all of it} is broken. Order <id>.",
        "{Part|Some} of order <id> is {broken|damaged}.",
        "{I|We} received order <id> {broken|damaged}.",
        "{Something|A part} is broken in {parcel|order|package} <id>.",
        "{I|We} found <items> broken in order <id>.",
        "The box of order <id> was {crushed|wet} and the content is damaged.",
        "Broken on arrival: <items>, order <id>.",
        "{My|Our} order <id> {came|arrived} {broken|cracked}.",
        "Damaged {goods|delivery}: <items> in order <id>.",
        "{I|We} opened {parcel|package} <id> and {it|all} was cracked.",
        "<items> from order <id> {does not|doesn't} work, it is broken.",
        "{My|The} delivery <id> is {scratched|cracked}.",
        "{I|We} got order <id> and it is damaged.",
    ],
    "invoice": [
        "{Please|Pls} send {me|us} the invoice for order <id>.",
        "{I|We} need an invoice for <id>.",
        "{Can|Could} {I|we} have {a|the} receipt for order <id>?",
        "The invoice for <items> is missing, order <id>.",
        "{Can|Could} {I|we} get {an|the} invoice for order <id>{, please|}?",
        "There is a mistake in the invoice of order <id>.",
        "Invoice for <id>{, please|}.",
        "{I|We} did not get the {invoice|bill} for order <id>.",
        "My {accountant|boss} needs the receipt for <items>, order <id>.",
        "{I|We} need the receipt for {order|number} <id>.",
        "{Could|Can} you {mail|send} {me|us} the bill for order <id>?",
        "Where is the invoice for order <id>?",
    ],
    "address": [
        "{Please|Pls} change the address of order <id>.",
        "{I|We} {have moved|moved}, order <id> {must|should} go to a new address.",
        "{Can|Could} you change {my|the} delivery address for <id>?",
        "{The|My} address {on|for} order <id> is wrong.",
        "{Can|Could} you change the address {on|for} order <id>{, please|}?",
        "Wrong address {on|for} <id>, please {fix|change} it.",
        "New address for order <id>.",
        "{I|We} need to {update|change} the address for order <id>.",
        "{I|We} gave you the {wrong|old} address for order <id>.",
        "Order <id> has the wrong address.",
        "Please send order <id> to {our|my} new address.",
    ],
}  # fmt: skip

GREETINGS: Final = [
    "Hi,", "Hello,", "Hi there,", "Dear team,", "Hello there,", "Hey,", "Good morning,", "Good evening,", "Hi team,",
    "Good afternoon,", "Dear shop,", "Hello team,", "Greetings,", "Hey there,", "Dear all,",
]  # fmt: skip

# Where the customer says who they are: at the start, or as a signature.
INTRODUCTIONS: Final = [
    "{my name is|my name's} <name>.", "this is <name>.", "{I'm|I am} <name>.", "<name> here.", "it's <name>.",
    "<name> {writing|speaking} here.", "you have an order from <name>.", "here is <name>.", "I am called <name>.",
    "<name> is my name.",
]  # fmt: skip
SIGNATURES: Final = [
    "Thanks, <name>", "Best, <name>", "Regards, <name>", "Thank you, <name>", "Many thanks, <name>", "Cheers, <name>",
    "- <name>", "Kind regards, <name>", "Yours, <name>", "Best regards, <name>", "Best wishes, <name>", "<name>",
    "Bye, <name>", "Greetings, <name>", "Thanks a lot, <name>",
]  # fmt: skip

DATES_AHEAD: Final = [
    "{I|We} need it by <date>.", "{It|This} {must|should} be here {by|before} <date>.",
    "Please deliver {on|by} <date>.", "The {party|event|birthday} is on <date>.", "It should be here by <date>.",
    "The deadline is <date>.", "Can it arrive {by|before} <date>?", "{I|We} leave on <date>.",
    "Delivery {on|by} <date> {would be|is} {best|fine}.", "{Please|Kindly} deliver before <date>.",
    "{We|I} will be at home on <date>.", "By <date>, please.", "<date> {works|is good} for {me|us}.",
    "Best day is <date>.", "{I|We} must have it by <date>.",
]  # fmt: skip
DATES_PAST: Final = [
    "{I|We} ordered {it|this|} on <date>.", "{I|We} paid on <date>.", "It was {ordered|bought} on <date>.",
    "{The|My} order is from <date>.", "{I|We} bought it on <date>.", "The date of {the order|purchase} is <date>.",
    "{I|We} placed the order on <date>.", "It was delivered on <date>.", "It {arrived|came} on <date>.",
    "The order was placed on <date>.", "Your mail of <date> {says|said} nothing.", "{I|We} wrote to you on <date>.",
    "You promised it for <date>.", "It was due on <date>.", "It was paid on <date>.",
]  # fmt: skip

CITY_LINES: Final = [
    "{Ship|Send} it to <city>.", "Deliver to <city>{, please|}.", "{I|We} live in <city>.",
    "{We|I} {are|was} in <city>.", "Please deliver to <city>.", "The address is in <city>.",
    "{It|This} goes to <city>.", "My place is in <city>.", "The parcel goes to <city>.",
    "{I|We} {live|stay} {near|in} <city>.", "Our {shop|office} is in <city>.", "Delivery to <city>.",
    "{My|Our} city is <city>.", "I am based in <city>.", "{Our|My} address is in <city>.",
]  # fmt: skip
NEW_CITY_LINES: Final = [
    "The new address is in <city>{, not in <other_city>|}.", "{Ship|Send} it to <city>{ instead of <other_city>|}.",
    "{I|We} now live in <city>.", "{I|We} moved {from <other_city> |}to <city>.",
    "It should go to <city>{, not to <other_city>|}.", "New city: <city>.", "{I|We} live in <city> now.",
    "Please deliver to <city>{ instead of <other_city>|}.", "It must go to <city>{, not to <other_city>|}.",
    "The new city is <city>.",
]  # fmt: skip

HIGH: Final = [
    "{This|It} is {very |really |}urgent.", "{I|We} need {this|it} asap.", "Please hurry{ up|}.",
    "It is an emergency.", "Please, this is urgent.", "As soon as possible{, please|}.", "{Urgent!|URGENT.}",
    "{I|We} can't wait {any |}longer.", "Please answer {at once|today}.", "Please be quick, it is urgent.",
    "{I|We} need help right now.", "ASAP{ please|}!", "{This|It} cannot wait.", "Please do {this|it} immediately.",
    "{I|We} need an answer as soon as possible.",
]  # fmt: skip
LOW: Final = [
    "No rush{ at all|}.", "No hurry{ at all|}.", "Whenever you {have|find} time.", "Take your time.",
    "There is no rush.", "{This|It} is not urgent.", "There is no hurry{ with this|}.", "It can wait.", "No stress.",
    "{This|It} is not urgent at all.", "{I|We} can wait.", "Next week is {fine|soon enough}.", "Not urgent.",
    "Any time {is fine|will do}.", "Just take your time.",
]  # fmt: skip

# Things a reader has to ignore.
DISTRACTORS: Final = [
    "I have been a customer for <n> years.", "{I|We} paid <n> euros for it.",
    "My neighbour <other_name> loves your shop.", "The weather is {great|awful} here.", "I paid <n> dollars for it.",
    "Last time all went well.", "I called <n> times.", "You have a nice shop.",
    "My {sister|brother|friend} <other_name> told me about you.", "I called you <n> times.",
    "Order <other_id> was fine.", "We are a team of <n> people.", "The site was slow today.",
    "My old order was <other_id>.", "My {friend|boss} <other_name> loves your shop.",
    "<other_name> from your team was very kind.", "We have <n> cats.", "I once lived in <other_city>.",
    "My cat is <n> years old.", "The old order <other_id> was fine.",
]  # fmt: skip
CLOSERS: Final = [
    "Thanks!", "Thank you.", "Thanks in advance.", "Cheers.", "Thank you!", "Have a nice day.", "Bye.",
    "Many thanks.", "Please let me know.", "Thanks a lot.",
]  # fmt: skip
