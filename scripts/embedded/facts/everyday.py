"""A little of what everyone knows: capitals, opposites, animals, the calendar, some nature. Marks: see `knowledge`."""

# ruff: noqa: E501  (one answer, one line)
from __future__ import annotations

CAPITALS = dict(
    pair.split("=")
    for pair in (
        "France=Paris|Germany=Berlin|Italy=Rome|Spain=Madrid|Portugal=Lisbon|Austria=Vienna|Switzerland=Bern|Belgium=Brussels|"
        "the Netherlands=Amsterdam|Denmark=Copenhagen|Sweden=Stockholm|Norway=Oslo|Finland=Helsinki|Poland=Warsaw|Hungary=Budapest|"
        "Greece=Athens|Ireland=Dublin|England=London|Scotland=Edinburgh|Iceland=Reykjavik|Russia=Moscow|Ukraine=Kyiv|Turkey=Ankara|"
        "Egypt=Cairo|Kenya=Nairobi|Morocco=Rabat|Nigeria=Abuja|Ghana=Accra|Japan=Tokyo|China=Beijing|India=Delhi|Thailand=Bangkok|"
        "Vietnam=Hanoi|Indonesia=Jakarta|South Korea=Seoul|Australia=Canberra|New Zealand=Wellington|Canada=Ottawa|Mexico=Mexico City|"
        "Brazil=Brasilia|Argentina=Buenos Aires|Chile=Santiago|Peru=Lima|Colombia=Bogota|Cuba=Havana|the United States=Washington"
    ).split("|")
)
ASK_CAPITAL = (
    "[What is|What's|Tell me|Name|Do you know|Which city is|Can you tell me|Give me|Which is|I need] the capital[ city|] of {country}[?|]"
)
ASK_CAPITAL_OF = "[{city} is the capital of which country|Of which country is {city} the capital|Which country has the capital {city}|What country's capital is {city}|{city} is the capital of what country][?|]"

OPPOSITES: tuple[tuple[str, str], ...] = tuple(
    (pair.split("=")[0], pair.split("=")[1])
    for pair in (
        "hot=cold|big=small|fast=slow|up=down|left=right|day=night|light=dark|good=bad|happy=sad|old=new|high=low|long=short|open=closed|"
        "full=empty|hard=soft|wet=dry|early=late|rich=poor|strong=weak|thick=thin|loud=quiet|clean=dirty|begin=end|buy=sell|win=lose|"
        "push=pull|love=hate|north=south|east=west|inside=outside|above=below|before=after|first=last|true=false|easy=difficult|"
        "near=far|wide=narrow|deep=shallow|sharp=blunt|heavy=light|brave=cowardly|awake=asleep|summer=winter|safe=dangerous"
    ).split("|")
)
ASK_OPPOSITE = "[What is|What's|Tell me|Name|Do you know|Give me|I need|Can you tell me] the opposite of {word}[?|]"

ANIMALS: tuple[tuple[str, str, str], ...] = (  # animal, sound, young
    ("dog", "barks", "puppy"), ("cat", "meows", "kitten"), ("cow", "moos", "calf"), ("sheep", "bleats", "lamb"), ("horse", "neighs", "foal"),
    ("pig", "grunts", "piglet"), ("lion", "roars", "cub"), ("duck", "quacks", "duckling"), ("frog", "croaks", "tadpole"), ("owl", "hoots", "owlet"),
    ("hen", "clucks", "chick"), ("wolf", "howls", "pup"), ("goat", "bleats", "kid"), ("bear", "growls", "cub"), ("goose", "honks", "gosling"),
)  # fmt: skip
ASK_SOUND = "[What sound does|Which sound does|What noise does|Which noise does] {a animal} make[?|]"
ASK_YOUNG = "[What is|What's|What do you call|How do you call|What is the name of|Tell me the name of] [a young {animal}|a baby {animal}|the young of {a animal}|the baby of {a animal}][?|]"

GENERAL: tuple[tuple[str, str], ...] = (
    ("[What color is|What colour is|Which color has|What is the color of|Tell me the color of] the sky[ on a clear day|][?|]", "The sky is «blue»."),
    ("[What color is|What colour is|Which color has|What is the color of|Tell me the color of] [grass|the grass][?|]", "Grass is «green»."),
    ("[What color is|What colour is|Which color has|What is the color of|Tell me the color of] [snow|the snow][?|]", "Snow is «white»."),
    ("[What color is|What colour is|Which color has|What is the color of|Tell me the color of] [a banana|bananas|a ripe banana][?|]", "A ripe banana is «yellow»."),
    ("[What color is|What colour is|Which color has|What is the color of|Tell me the color of] [blood|our blood|human blood][?|]", "Blood is «red»."),
    ("[How many days are in|How many days has|How many days are there in|How many days does|Number of days in] a week[ have|][?|]", "A week has «seven» days."),
    ("[How many days are in|How many days has|How many days are there in|How many days does|Number of days in] a year[ have|][?|]", "A year has «365» days, and a leap year has 366."),
    ("[How many months are in|How many months has|How many months are there in|How many months does|Number of months in] a year[ have|][?|]", "A year has «twelve» months."),
    ("[How many hours are in|How many hours has|How many hours are there in|How many hours does|Number of hours in] a day[ have|][?|]", "A day has «24» hours."),
    ("[How many minutes are in|How many minutes has|How many minutes are there in|How many minutes does|Number of minutes in] an hour[ have|][?|]", "An hour has «60» minutes."),
    ("[How many seconds are in|How many seconds has|How many seconds are there in|How many seconds does|Number of seconds in] a minute[ have|][?|]", "A minute has «60» seconds."),
    ("[How many legs does|How many legs has|How many legs are on|Tell me how many legs has] a spider[ have|][?|]", "A spider has «eight» legs."),
    ("[How many legs does|How many legs has|How many legs are on|Tell me how many legs has] [a dog|a cat|a horse|a cow][ have|][?|]", "It has «four» legs."),
    ("[How many legs does|How many legs has|How many legs are on|Tell me how many legs has] [an insect|an ant|a bee][ have|][?|]", "It has «six» legs."),
    ("[How many wheels does|How many wheels has|How many wheels are on] a [bicycle|bike][ have|][?|]", "A bicycle has «two» wheels."),
    ("[How many continents are there|How many continents does the earth have|What is the number of continents|How many continents exist][?|]", "There are «seven» continents."),
    ("[What is|What's|Which is|Name|Tell me] the [largest|biggest] ocean[ on earth| in the world|][?|]", "The «Pacific» is the largest ocean."),
    ("[What is|What's|Which is|Name|Tell me] the [highest|tallest] mountain[ on earth| in the world|][?|]", "Mount «Everest» is the highest mountain."),
    ("[What is|What's|Which is|Name|Tell me] the [largest|biggest] planet[ of the solar system| in our solar system|][?|]", "«Jupiter» is the largest planet of the solar system."),
    ("[What is|What's|Which is|Name|Tell me] the [largest|biggest] [animal|living animal][ on earth| in the world|][?|]", "The blue «whale» is the largest animal."),
    ("[What is|What's|Which is|Name|Tell me] the fastest [land animal|animal on land][ on earth| in the world|][?|]", "The «cheetah» is the fastest animal on land."),
    ("[What is|What's|What are|Tell me] [water made of|the formula of water|the chemical formula of water|the parts of water][?|]", "Water is made of hydrogen and oxygen; its formula is «H2O»."),
    ("[At what temperature does|When does|At which temperature does] water boil[?|]", "Water boils at «100» degrees Celsius at sea level."),
    ("[At what temperature does|When does|At which temperature does] water freeze[?|]", "Water freezes at «0» degrees Celsius."),
    ("[Why is|Can you explain why|Explain why|Tell me why|Do you know why] the sky [is blue|blue][?|]", "Air scatters blue light more than red light, so blue light reaches us from all «directions»."),
    ("[Why do|Can you explain why|Explain why|Tell me why|Do you know why] leaves [are green|look green|have a green color][?|]", "Leaves are green because of «chlorophyll», which takes in red and blue light."),
    ("[What do|What do all|Tell me what] plants need[ to grow| to live|][?|]", "Plants need «light», water, air and soil."),
    ("[What do|What do most|Tell me what] bees make[?|]", "Bees make «honey»."),
    ("[Where does|From where does|From what does] [the sun rise|the sun come up][?|]", "The sun rises in the «east» and sets in the west."),
    ("[What is|What's|Explain|Tell me what is|What causes] [rain|the rain][?|]", "Rain is «water» that falls from clouds in drops."),
    ("[What is|What's|Explain|Tell me what is|What causes] a rainbow[?|]", "A rainbow appears when sunlight is «split» into its colors by drops of water."),
    ("[What is|What's|Explain|Tell me what is] gravity[?|]", "Gravity is the force by which masses «attract» each other."),
    ("[What is|What's|Explain|Tell me what is] [the moon|our moon][?|]", "The moon is a ball of rock that goes around the «earth» in about four weeks."),
    ("[What is|What's|Explain|Tell me what is] [the sun|our sun][?|]", "The sun is a «star», a very hot ball of gas that gives us light and warmth."),
    ("[What is|What's|Explain|Tell me what is] [a computer|computers][?|]", "A computer is a machine that follows «instructions» and works with numbers."),
    ("[What is|What's|Explain|Tell me what is] [the internet|the Internet][?|]", "The internet is a worldwide network of «computers»."),
    ("[What is|What's|Explain|Tell me what is] [Python|the language Python|python][?|]", "Python is a popular «programming» language that is easy to read."),
    ("[What is|What's|Explain|Tell me what is|Define] [AI|artificial intelligence|Artificial Intelligence][?|]", "Artificial intelligence means that «machines» do things for which people need to think."),
    ("[What is|What's|Tell me|Name] [the first month of the year|the first month][?|]", "«January» is the first month of the year."),
    ("[What is|What's|Tell me|Name] [the last month of the year|the last month][?|]", "«December» is the last month of the year."),
    ("[What are|Name|Tell me|List|Which are] the [four seasons|seasons|seasons of the year][?|]", "The seasons are «spring», summer, autumn and winter."),
    ("[What are|Name|Tell me|List|Which are] the days of the week[?|]", "The days are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and «Sunday»."),
    ("[What are|Name|Tell me|List|Which are] the months[ of the year|][?|]", "The months are January, February, March, April, May, June, July, August, September, October, November and «December»."),
    ("[What are|Name|Tell me|List|Which are] the [primary colors|three primary colors|basic colors][?|]", "The primary colors are «red», yellow and blue."),
    ("[What are|Name|Tell me|List|Which are] the [planets|planets of the solar system|eight planets][?|]", "The planets are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and «Neptune»."),
    ("[What are|Name|Tell me|List|Which are] the [five senses|senses|human senses][?|]", "The senses are sight, hearing, «smell», taste and touch."),
    ("[What are|Name|Tell me|List|Which are] the continents[?|]", "The continents are Africa, Antarctica, Asia, «Australia», Europe, North America and South America."),
    ("[Which|What] [number comes after ten|comes after ten|is the number after ten][?|]", "After ten comes «eleven»."),
    ("[How do I|How do you|How can I|Tell me how to|How to] make tea[?|]", "Boil water, pour it over the tea, «wait» for three to five minutes, and take the leaves out."),
    ("[How do I|How do you|How can I|Tell me how to|How to] [boil an egg|cook an egg][?|]", "Put the egg into boiling water and wait for five to «ten» minutes, depending on how firm you like it."),
    ("[How do I|How do you|How can I|Tell me how to|How to] [fall asleep|sleep better|sleep well][?|]", "Go to bed at the same time every day, keep the room «dark» and quiet, and put screens away early."),
    ("[How do I|How do you|How can I|Tell me how to|How to] [learn faster|learn better|learn something new][?|]", "Practise a little every «day», ask questions, and explain what you learned to somebody else."),
    ("[How do I|How do you|How can I|Tell me how to|How to] [learn programming|learn to program|start programming][?|]", "Start with a «small» project, write a little code every day, and read the code of others."),
    ("[Write|Show me|Give me|Can you write] [hello world in Python|a hello world program in Python|a Python hello world|a Python program that says hello][?|]", '«print»("Hello, world!")'),
    ("[Write|Show me|Give me|Can you write] [a Python function that adds two numbers|a function to add two numbers|a Python function for addition][?|]", "def add(left, right):\n    «return» left + right"),
)  # fmt: skip
