"""Word lists: names, places, things. Short on purpose; invented names make copying a skill, not a memory."""

# ruff: noqa: SIM905  (a list of words reads best as words)
from __future__ import annotations

from random import Random

FIRST_NAMES = tuple(
    "Anna Ben Clara David Emma Felix Grace Hugo Iris Jonas Kira Leo Mia Noah Olga Paul Rosa Sam Tara Umar Vera Will "
    "Yara Zoe Alice Bob Carol Dan Ella Finn Gina Henry Ida Jack Kate Lucas Maria Nina Oscar Petra Quinn Ruth Simon "
    "Tom Ursula Victor Wendy Xavier Yusuf Zara Ahmed Aisha Akira Amara Andre Bianca Carlos Chen Daria Diego Elena "
    "Fatima Ganesh Hana Igor Ingrid Ivan Jamal Joao Julia Kenji Lena Li Lin Luis Malik Marco Mateo Mei Nadia Naomi "
    "Nikhil Omar Pablo Priya Rahul Raj Sara Sofia Sven Tanya Tariq Theo Thomas Viktor Wei Yuki Zainab James John Mary "
    "Michael Sarah Peter Laura Mark Lisa Robert Linda Susan Karen Eric Alex Max Chris Amy Brian Kevin Rachel Daniel "
    "Emily George Helen Jane Martin Nick Olivia Patrick Sandra Steve Tim Walter".split()
)
LAST_NAMES = tuple(
    "Adams Baker Carter Diaz Evans Fischer Garcia Haddad Ito Jensen Kim Lopez Meyer Novak Okafor Patel Quist Rossi "
    "Singh Tanaka Usman Vogel Walker Xu Young Zhang Berg Costa Dubois Eriksen Fontaine Green Hill Ivanov Jones King "
    "Larsen Moreau Nguyen Olsen Park Rivera Schmidt Turner Weber Wright Brown Smith Wilson Taylor Clark Lewis".split()
)
CITIES = tuple(
    "Paris London Berlin Madrid Rome Vienna Lisbon Oslo Stockholm Helsinki Copenhagen Dublin Warsaw Prague Budapest "
    "Athens Cairo Nairobi Lagos Accra Tunis Rabat Istanbul Ankara Tehran Delhi Mumbai Dhaka Bangkok Hanoi Jakarta "
    "Manila Singapore Beijing Shanghai Seoul Tokyo Osaka Kyoto Sydney Melbourne Auckland Toronto Montreal Vancouver "
    "Boston Chicago Seattle Denver Austin Miami Lima Bogota Quito Santiago Montevideo Zurich Geneva Munich Hamburg "
    "Milan Naples Porto Seville Lyon Marseille Bergen Tallinn Riga Vilnius Zagreb Sofia Krakow Utrecht Antwerp".split()
)
COLOURS = tuple("red blue green yellow orange purple brown black white grey pink silver golden turquoise".split())
JOBS = tuple(
    "teacher|baker|nurse|doctor|farmer|driver|painter|pilot|engineer|gardener|writer|cook|carpenter|musician|"
    "librarian|lawyer|dentist|photographer|programmer|scientist|student|designer|plumber|electrician|waiter|"
    "tailor|mechanic|translator|journalist|architect|firefighter|shop owner|data analyst|sailor|chemist".split("|")
)
HOBBIES = tuple(
    "painting|swimming|reading|chess|football|cooking|hiking|singing|dancing|gardening|photography|cycling|fishing|"
    "running|knitting|astronomy|sailing|climbing|playing the piano|playing the guitar|board games|baking|tennis|"
    "bird watching|skiing|drawing|writing poems|yoga|basketball|collecting stamps".split("|")
)
FRUITS = tuple(
    "apple banana cherry grape lemon mango melon orange peach pear plum strawberry kiwi apricot fig pineapple".split()
)
VEGETABLES = tuple("carrot potato tomato onion cabbage spinach pea bean pumpkin cucumber pepper broccoli leek".split())
FOODS = tuple(
    "pizza|pasta|soup|rice|bread|cheese|sushi|curry|pancakes|salad|chocolate|ice cream|noodles|dumplings|tacos|"
    "apple pie|honey cake|roast potatoes|mushroom stew|lentil soup".split("|")
)
ANIMALS = tuple(
    "fox rabbit bear wolf owl mouse cat dog hedgehog squirrel deer frog turtle duck goose sparrow crow horse pony "
    "sheep goat pig cow hen otter beaver badger mole bee ant butterfly spider snail whale dolphin penguin seal lion "
    "tiger elephant giraffe monkey parrot crocodile camel kangaroo koala panda zebra hippo bat swan eagle".split()
)
PETS = tuple(
    "dog cat rabbit hamster parrot turtle goldfish pony guinea pig canary".replace("guinea pig", "mouse").split()
)
COMPANIES = tuple(
    "Northwind Labs|Blue Harbor|Acme Tools|Bright Mill|Granite Works|Silver Pine|Orbit Foods|Maple Street Books|"
    "Lumen Energy|Red Kite Travel|Delta Print|Quiet River|Sunfield Farms|Copper Lane|Tidewater Bank|Pixel Forge|"
    "Cedar Clinic|Summit Optics|Harvest Table|Iron Bridge".split("|")
)
PRODUCTS = tuple(
    "lamp|chair|table|keyboard|backpack|bicycle|teapot|camera|notebook|umbrella|phone|headset|desk|mirror|clock|"
    "jacket|kettle|radio|tent|printer|monitor|blanket|mug|toaster|pen|suitcase|scarf|helmet|drill|candle".split("|")
)
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_ONSETS = "b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t th tr v w z".split()
_VOWELS = "a e i o u a e i o ai ea ee io ou".split()
_CODAS = ["", "", "", "l", "n", "r", "s", "t", "m", "x", "nd", "rk", "th", "ll"]


def invented_name(random: Random) -> str:
    """Invent a name that no list holds: two or three syllables."""
    syllables = [random.choice(_ONSETS) + random.choice(_VOWELS) for _ in range(random.choice((1, 2, 2)))]
    syllables.append(random.choice(_ONSETS) + random.choice(_VOWELS) + random.choice(_CODAS))
    return "".join(syllables).capitalize()


def first_name(random: Random) -> str:
    return random.choice(FIRST_NAMES) if random.random() < 0.6 else invented_name(random)


def full_name(random: Random) -> str:
    last = random.choice(LAST_NAMES) if random.random() < 0.6 else invented_name(random)
    return f"{first_name(random)} {last}"


def city(random: Random) -> str:
    return random.choice(CITIES) if random.random() < 0.6 else invented_name(random)


def company(random: Random) -> str:
    if random.random() < 0.6:
        return random.choice(COMPANIES)
    return f"{invented_name(random)} {random.choice(('Labs', 'Works', 'Foods', 'Group', 'Systems', 'Studio'))}"
