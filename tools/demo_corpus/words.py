"""The nouns, adjectives and names that stories are made of, and invented ones to copy."""

import random

ANIMALS = """fox bear cat dog mouse rabbit owl frog hedgehog squirrel badger otter beaver deer wolf
lion tiger elephant giraffe monkey penguin turtle tortoise snail duck goose hen rooster crow raven
sparrow robin swan heron eagle parrot peacock horse pony donkey goat sheep lamb cow pig piglet
hamster mole rat bat bee ant spider butterfly ladybug beetle cricket firefly fish whale dolphin seal
crab octopus lizard snake crocodile hippo rhino zebra camel kangaroo koala panda raccoon skunk moose
weasel kitten puppy dragon unicorn phoenix llama sloth jellyfish starfish shark lobster hare bunny
chicken turkey pigeon dove stork flamingo toad newt moth wasp caterpillar worm bull ox chimpanzee
gorilla leopard cheetah jaguar hyena meerkat walrus platypus wombat ferret mule colt foal cub
dinosaur chameleon salamander dragonfly grasshopper hummingbird woodpecker seagull pelican""".split()

PEOPLE_ANY = """baker farmer sailor pilot doctor teacher painter carpenter tailor shepherd gardener
fisher miller potter weaver singer dancer drummer pianist poet writer librarian clockmaker
shoemaker blacksmith cook chef knight wizard pirate captain merchant hunter miner soldier guard
scientist astronaut inventor student child traveler musician juggler clown magician beekeeper
postman mechanic engineer programmer detective explorer healer astronomer glassblower candlemaker
mapmaker lighthouse_keeper robot giant dwarf elf ghost goblin troll ogre snowman scarecrow puppet
nurse lawyer judge mayor beggar thief spy ninja samurai cowboy firefighter plumber builder banker
alien monster vampire hermit monk tourist runner skater wrestler violinist photographer zookeeper
bus_driver taxi_driver train_driver ice_cream_seller toymaker bookseller""".split()

PEOPLE_HE = "boy man king prince grandfather father uncle brother old_man wise_king".split()
PEOPLE_SHE = """girl woman queen princess grandmother mother aunt sister witch fairy mermaid
old_woman ballerina nun""".split()

MINDS = """small brave shy clever kind curious lonely proud gentle quiet cheerful lazy young old
little friendly grumpy honest greedy patient careful hungry tired sleepy happy sad wise foolish
stubborn playful careless generous humble nervous timid noisy tiny tall poor rich busy funny
forgetful silly bold restless polite jealous impatient""".split()

LOOKS = """old red blue green silver golden tiny wooden shiny small rusty bright yellow magic heavy
broken beautiful strange dusty round""".split()

THINGS = """lantern key kite bell book map drum flute boat basket blanket hat scarf coat ring crown
coin clock watch mirror teapot spoon bowl cup kettle candle lamp pencil paintbrush violin guitar
trumpet whistle balloon umbrella wagon wheel sled bicycle ladder rope hammer shovel bucket broom
needle button ribbon feather shell stone pebble acorn apple pear pie cake cookie pumpkin carrot
berry flower rose sunflower seed letter box chest jar bottle telescope compass camera radio puppet
doll toy ball marble mask mitten boot shoe glove quilt pillow chair table bench harp fiddle hourglass
locket necklace bracelet pearl diamond crystal gem statue vase jug barrel sack net fishing_rod oar
anchor sail flag banner sword shield helmet wand potion cloak treasure puzzle top yo-yo snow_globe
music_box piano train rocket spaceship car truck computer phone cheese bread honey_jar soup_pot
pancake sandwich cherry plum lemon mango pineapple banana watermelon mushroom onion turnip potato egg
nest tent backpack suitcase wallet purse notebook dictionary painting photograph postcard stamp
magnet battery light_bulb microphone robot_arm skateboard scooter surfboard canoe raft parachute
toothbrush comb soap_bar sponge towel sock belt button_box sweater dress jacket pajama_set
toaster oven frying_pan fork plate lunchbox cupcake donut lollipop candy_cane chocolate_bar
snowball icicle pinecone leaf twig branch log pine_tree_cone lucky_coin clover horn saddle
horseshoe plow rake scarecrow_hat windmill_toy calendar newspaper envelope paper_plane magnifying_glass
ruler eraser crayon chalk_box paint_box globe trophy medal dice domino chess_set card_deck""".split()

# Too big to carry: a story goes there or looks at it.
SIGHTS = """moon sea mountain lighthouse castle waterfall rainbow volcano ocean desert star sun
comet cave island bridge tower windmill big_city museum circus carnival glacier canyon temple palace
northern_lights great_wall old_train_station snow_mountain giant_tree hidden_lake""".split()

PLACES = """in|the forest;in|a quiet village;by|the sea;near|the river;in|the mountains;on|a small
 farm;in|a big city;in|the desert;on|an island;in|a green valley;at the edge of|the woods;by|a lake;in
|the garden;on|a hill;in|a castle;in|the jungle;under|an old oak tree;in|a cave;near|the harbor;in
|a meadow;on|the beach;in|a snowy village;next to|a windmill;in|a small town;by|a waterfall;in
|a lighthouse;on|a ship;in|the library;at|the market;in|an old house;in|the park;on|a space station;on
|the moon;in|a kingdom far away;at|the school;in|a bakery;in|the swamp;near|a volcano;in|a hidden
 valley;on|a cloud;in|the city park;behind|the old mill;in|a tower;at|the zoo;in|the kitchen;under
|the sea;in|a train station;on|the savanna;at|the North Pole;in|a workshop;in|the hospital;in
|a museum;in|space;in|the countryside;in|a small apartment"""

NAMES_HE = """Tavi Milo Oscar Finn Leo Max Tom Ben Sam Jack Theo Hugo Otto Felix Jasper Rowan Arlo
Bruno Emil Ivan Noah Liam Omar Ravi Kenji Diego Pedro Anders Nils Tariq Kofi Samir Luca Marco Pablo
Henry Arthur Walter Edgar Basil Barnaby Pip Rusty Biscuit Bramble Ash Alex Peter Paul John James
David Daniel Adam Lucas Ethan Oliver Charlie George Harry Jamal Chen Hiro Bob Joe Mike""".split()
NAMES_SHE = """Rosa Lila Mira Nora Ella Ada Ivy Ruby Hazel Clara Luna Maya Zoe Lily Anna Emma Olive
Pearl Poppy Willow Daisy Flora Greta Heidi Ines Jade Kira Leila Nadia Priya Sana Tara Uma Vera
Wilma Yuki Zara Amina Freya Elsa Mabel Tilly Dot Penny Clover Honey Juniper Marta Alice Mary Sarah
Sophie Lucy Grace Julia Eva Mia Olivia Amelia Fatima Mei Sakura Carmen Lena Jane Kate""".split()

_ONSETS = "b br c cl d dr f fl g gl gr h j k l m n p pl qu r s sh sk sn st t th tr v w z".split()
_VOWELS = "a e i o u ai ee oo".split()
_CODAS = ["", "", "n", "r", "l", "m", "t", "x", "nd", "rk", "ck", "sh", "ll"]


def plain(word: str) -> str:
    return word.replace("_", " ")


def places() -> list[tuple[str, str]]:
    """(preposition, place) pairs, as in ("by", "the sea")."""
    pairs = PLACES.replace("\n", "").split(";")
    return [(a.strip(), b.strip()) for a, b in (pair.split("|") for pair in pairs)]


def invented(rng: random.Random) -> str:
    """A word that no list holds, so that the model learns to copy from the prompt."""
    count = rng.choice([2, 2, 3])
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count)) + rng.choice(_CODAS)
